"""Launch settings of other training frameworks read back: what they say, what is wrong, what they cost."""
