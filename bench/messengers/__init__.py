"""The messaging systems that `bench/messaging.py` compares: each has the servers it starts and the client that loads
them. `messenger.py` is what they have in common."""
