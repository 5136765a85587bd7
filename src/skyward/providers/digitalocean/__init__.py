"""Provider of DigitalOcean's droplets."""
