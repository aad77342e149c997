"""Pure knowledge of checkpoints: which objects make up a set and which says that it is whole."""
