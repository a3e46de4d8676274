"""What every long-running part needs: time, retries, group commit, leader election, event-loop threads, metrics."""
