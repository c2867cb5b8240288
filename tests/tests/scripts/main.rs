//! The cache scripts on a real Redis: each promise of the cache protocol that one key's scripts can keep, by name, and the scripts held
//! against the pure rules of `recant_schema::tombstone` with random sequences.

mod arguments;
mod cache;
mod promises;
mod sequences;
