"""Channel fan-out: each event that is posted to a channel becomes one record in each inbox partition with online
members of the channel."""
