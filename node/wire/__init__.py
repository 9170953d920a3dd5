"""Everything between nodes: messages, frames, and the links that carry them."""
