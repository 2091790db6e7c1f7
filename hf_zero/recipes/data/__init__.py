"""From files or the hub to what a trainer takes."""
