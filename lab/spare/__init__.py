"""SPARe: what masking losses endures and costs."""
