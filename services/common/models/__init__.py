"""Model folders: where they live, and how a name, a GGUF file or a hub becomes one."""
