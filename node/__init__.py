"""The node daemon: model, data, links and the step transaction."""
