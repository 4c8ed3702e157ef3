"""Train what the demo audits: small models, harmless re-trainings of them, and planted shortcuts.

Checkpoints are deterministic given the seeds and kept under a digest of everything that makes them, so
that a second call finds them.
"""

from audit.demo.configs import write_configs
from audit.demo.text import ensure_text
from audit.demo.trained import TrainedDemo
from audit.demo.vision import ensure_vision

__all__ = ["TrainedDemo", "ensure_text", "ensure_vision", "write_configs"]
