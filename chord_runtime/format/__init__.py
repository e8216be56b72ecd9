"""The packed format: nothing outside this package knows a byte offset. docs/format.md is its page."""
