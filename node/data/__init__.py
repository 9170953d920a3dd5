"""Text to tokens, tokens to samples, samples to the windows of steps."""
