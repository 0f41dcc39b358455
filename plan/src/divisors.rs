//! Common divisors and multiples.

/// Returns the greatest common divisor; 0 is neutral.
pub(crate) const fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Returns the least common multiple of two numbers above 0; `None` if it does not fit.
pub(crate) fn lcm(a: u64, b: u64) -> Option<u64> {
    (a / gcd(a, b)).checked_mul(b)
}
