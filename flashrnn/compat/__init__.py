"""How other packages call a recurrence: their functions and layouts, computed by this one."""
