"""``python -m autoplan`` does what the command ``autoplan`` does."""

from autoplan.cli import main

raise SystemExit(main())
