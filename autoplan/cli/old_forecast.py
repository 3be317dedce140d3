"""A plan and the profile it is used with in, a warning out where the plan's forecast is of other hardware."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoplan.hardware import HardwareProfile
    from autoplan.plan import Plan


def warn_of_old_forecast(plan: Plan, profile: HardwareProfile | None = None) -> None:
    """Say on stderr that times and memory no longer hold; the plan itself still runs.

    ``profile`` None: the one the plan names, if it is known here.
    """
    from autoplan.errors import AutoplanError, BadPlanError
    from autoplan.hardware import load_profile

    try:
        plan.require_hardware(profile or load_profile(plan.hardware))
    except BadPlanError as error:
        print(f"autoplan: warning: {error}", file=sys.stderr)
    except AutoplanError:
        return  # the profile is not here: nothing to compare with
