"""Chapter 9: the step made cheap."""
