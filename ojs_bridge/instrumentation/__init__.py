"""The exporters: `sentry`, `opentelemetry` and `prometheus`, each of which is imported by its own name."""
