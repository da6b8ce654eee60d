"""Programs that show kvplug at work, against real engines."""
