"""What a run tells of itself: events, ledger, summary, and the views of them."""
