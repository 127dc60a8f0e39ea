"""Import torchvision beside a torch it was not built for: ``import tokenmix.hosts.torchvision``, before timm or
transformers.

Importing this module is all there is to do. Without torchvision, and where it fits torch, nothing changes.
"""

from __future__ import annotations

from ..system.torchvision import ensure_torchvision

ensure_torchvision()
