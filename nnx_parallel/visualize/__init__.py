"""Every picture of the package."""
