"""The interfaces of other packages, with their functions and layouts, computed by this one."""
