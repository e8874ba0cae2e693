package proxy

// What Linux has beside other systems.
const abstractSockets, credentialsKnown = true, true
