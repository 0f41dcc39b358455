//! Effect of a device's power limit on its clock, as reported in the environment of a run.

use std::collections::BTreeMap;

const SHARE: &str = "power.arithmetic_share";
const FACTOR: &str = "power.arithmetic_factor";
const FLOAT8_FACTOR: &str = "power.float8_factor";

/// The clock of a run's steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Clock {
    /// Share of a step's time (0 to 1) that GEMMs, convolutions and attention take when they run
    /// alone.
    pub arithmetic_share: f64,
    /// Their time relative to the time at full clock.
    pub arithmetic_factor: f64,
    /// The same for 8-bit matmuls; `None` if there are none.
    pub float8_factor: Option<f64>,
}

impl Clock {
    /// Adds the clock to a run's environment, with four digits.
    pub fn tell(&self, environment: &mut BTreeMap<String, String>) {
        let mut fact = |key: &str, value: f64| {
            environment.insert(key.to_owned(), format!("{value:.4}"));
        };
        fact(SHARE, self.arithmetic_share);
        fact(FACTOR, self.arithmetic_factor);
        if let Some(factor) = self.float8_factor {
            fact(FLOAT8_FACTOR, factor);
        }
    }

    /// Reads the clock from a run's environment; `None` if it has none.
    #[must_use]
    pub fn from_environment(environment: &BTreeMap<String, String>) -> Option<Self> {
        let fact = |key: &str| environment.get(key)?.parse().ok();
        Some(Self {
            arithmetic_share: fact(SHARE)?,
            arithmetic_factor: fact(FACTOR)?,
            float8_factor: fact(FLOAT8_FACTOR),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_tells_what_it_was_told() {
        let mut environment = BTreeMap::from([("seed".to_owned(), "7".to_owned())]);
        assert_eq!(Clock::from_environment(&environment), None);
        let clock = Clock {
            arithmetic_share: 0.8215,
            arithmetic_factor: 1.0565,
            float8_factor: None,
        };
        clock.tell(&mut environment);
        assert_eq!(Clock::from_environment(&environment), Some(clock));
        assert_eq!(environment.len(), 3);
        let both = Clock {
            float8_factor: Some(1.0315),
            ..clock
        };
        both.tell(&mut environment);
        assert_eq!(Clock::from_environment(&environment), Some(both));
        environment.insert(SHARE.to_owned(), "most".to_owned());
        assert_eq!(Clock::from_environment(&environment), None);
    }
}
