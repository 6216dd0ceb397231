"""GGUF files, which llama.cpp and what is built on it read."""

from roi_lightning.export.gguf_file.verify import verify_gguf
from roi_lightning.export.gguf_file.write import GGUFSizes, write_gguf

__all__ = ["GGUFSizes", "verify_gguf", "write_gguf"]
