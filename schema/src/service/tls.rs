//! TLS. Its one decision: who computes.

/// Makes ring the provider of all TLS in this process; to be called first thing. Two providers end up in the build, because each of the clients asks
/// for its own, and rustls refuses to guess between two.
pub fn use_ring() {
    // An error means that somebody has chosen before: this function, called twice.
    let _ = rustls::crypto::ring::default_provider().install_default();
}
