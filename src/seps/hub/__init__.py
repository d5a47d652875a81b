"""Models as folders, on disk or on a hub: reading, saving, cards, downloads."""

from seps.hub.download import HubError, hub_folder

__all__ = ["HubError", "hub_folder"]
