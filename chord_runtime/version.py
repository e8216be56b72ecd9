"""The version of the package, read by the build and written into every manifest."""

VERSION = "0.1.0"
