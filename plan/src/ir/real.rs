//! Real-valued attributes of operations.

use serde::Serialize;
use std::cmp::Ordering;
use std::hash::{Hash, Hasher};

/// A real attribute, compared by its bits.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(transparent)]
pub struct Real(pub f64);

impl PartialEq for Real {
    fn eq(&self, o: &Self) -> bool {
        self.0.to_bits() == o.0.to_bits()
    }
}

impl Eq for Real {}

impl PartialOrd for Real {
    fn partial_cmp(&self, o: &Self) -> Option<Ordering> {
        Some(self.cmp(o))
    }
}

impl Ord for Real {
    fn cmp(&self, o: &Self) -> Ordering {
        self.0.total_cmp(&o.0)
    }
}

impl Hash for Real {
    fn hash<H: Hasher>(&self, h: &mut H) {
        self.0.to_bits().hash(h);
    }
}
