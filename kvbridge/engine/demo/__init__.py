"""The two engines of `kvbridge demo`, the model alone that they are compared with, and what they say to the demo."""
