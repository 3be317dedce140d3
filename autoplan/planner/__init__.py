"""The search: a capture, costs and pins come in; the best plan and its certificate go out."""
