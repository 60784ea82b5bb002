"""Load by strangers against a control process: half-open connections, large bodies without a token, and
bad tokens as fast as this machine can. Prints what a valid client and `/readyz` see meanwhile."""
