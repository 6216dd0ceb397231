"""Make an exported directory ready for the hub, and put it there."""

from roi_lightning.export.publishing.hub import check_login, check_name, push
from roi_lightning.export.publishing.publish import publish

__all__ = ["check_login", "check_name", "publish", "push"]
