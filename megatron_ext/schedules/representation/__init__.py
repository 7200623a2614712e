"""What a schedule is: actions, placement, the messages that follow, and the proof that it ends."""
