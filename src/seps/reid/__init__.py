"""Re-identification over RGB, near infrared and thermal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seps.reid.selection_check import check

__all__ = ["check"]


def __getattr__(name: str) -> Any:
    # On first use: the commands read the settings of this room without torch.
    if name == "check":
        from seps.reid.selection_check import check

        return check
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
