"""What identifies rows, models, functions and collators, so that a change is noticed."""
