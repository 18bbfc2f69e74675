"""What kvbridge processes say to each other: the messages, their frames, and what makes their delivery reliable."""
