"""The same operations, several ways: `reference` (numpy) defines them, `native` (C++) equals it."""
