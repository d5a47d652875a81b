"""Models as folders, on disk or on a hub: reading, saving, cards, downloads, uploads."""

from seps.hub.download import HubError, hub_folder
from seps.hub.upload import push_to_hub

__all__ = ["HubError", "hub_folder", "push_to_hub"]
