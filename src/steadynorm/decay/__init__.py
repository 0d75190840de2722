"""Decide each step's weight decay: what a group asks for, what an optimizer does with it, and `correct`."""
