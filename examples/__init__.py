"""Programs to copy from, and the demo. launch/ starts the engines of the demo and of the tests."""
