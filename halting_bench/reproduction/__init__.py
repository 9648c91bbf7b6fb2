"""The measurements behind REPRODUCTION.md: what three papers claim, at our scale."""
