"""A check of everything that needs a GPU, in ten minutes on a machine that has one."""
