"""The HTML report, a module a section: a :class:`~autoplan.plan.Plan` in, one self-contained page out."""
