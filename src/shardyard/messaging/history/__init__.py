"""The history of conversations: who said what to whom, and who has seen it."""
