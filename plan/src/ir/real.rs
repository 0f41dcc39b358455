//! Real-valued attributes of operations.

use serde::Serialize;
use std::hash::{Hash, Hasher};

/// A real attribute, compared and hashed by its bits.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(transparent)]
pub struct Real(pub f64);

impl PartialEq for Real {
    fn eq(&self, o: &Self) -> bool {
        self.0.to_bits() == o.0.to_bits()
    }
}

impl Eq for Real {}

impl Hash for Real {
    fn hash<H: Hasher>(&self, h: &mut H) {
        self.0.to_bits().hash(h);
    }
}
