//! Random numbers from a seed, the same on every machine.

/// The generator SplitMix64; any number is a seed.
#[derive(Clone, Copy, Debug)]
pub struct SplitMix64(pub u64);

impl SplitMix64 {
    /// Returns the next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first numbers of seed 0 in Vigna's `splitmix64.c`.
    #[test]
    fn numbers_are_those_of_the_reference() {
        let mut random = SplitMix64(0);
        assert_eq!(random.draw(), 0xe220_a839_7b1d_cdaf);
        assert_eq!(random.draw(), 0x6e78_9e6a_a1b9_65f4);
    }
}
