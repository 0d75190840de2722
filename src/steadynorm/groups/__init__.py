"""From a model's modules to roles, and from roles to parameter groups."""
