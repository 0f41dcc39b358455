//! Floating-point numbers in JSON, including those that JSON cannot represent: `"NaN"`, `"inf"`,
//! `"-inf"`.
//!
//! For use with `#[serde(with = "…")]`. A diverged loss must survive being stored.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Number {
    Finite(f64),
    Other(String),
}

impl From<f64> for Number {
    fn from(x: f64) -> Self {
        if x.is_finite() {
            Self::Finite(x)
        } else {
            Self::Other(x.to_string())
        }
    }
}

impl Number {
    fn value<E: de::Error>(self) -> Result<f64, E> {
        match self {
            Self::Finite(x) => Ok(x),
            Self::Other(text) => match text.as_str() {
                "NaN" => Ok(f64::NAN),
                "inf" => Ok(f64::INFINITY),
                "-inf" => Ok(f64::NEG_INFINITY),
                _ => Err(E::custom(format_args!("`{text}` is not a number"))),
            },
        }
    }
}

/// Writes one number.
///
/// # Errors
/// Fails if the serializer fails.
pub fn serialize<S: Serializer>(x: &f64, to: S) -> Result<S::Ok, S::Error> {
    Number::from(*x).serialize(to)
}

/// Reads one number.
///
/// # Errors
/// Fails if the value is not a number.
pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Number::deserialize(from)?.value()
}

/// The same for lists.
pub mod list {
    use super::{Deserialize, Deserializer, Number, Serializer};

    /// Writes the numbers.
    ///
    /// # Errors
    /// Fails if the serializer fails.
    pub fn serialize<S: Serializer>(all: &[f64], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(all.iter().map(|x| Number::from(*x)))
    }

    /// Reads the numbers.
    ///
    /// # Errors
    /// Fails if a value is not a number.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<f64>, D::Error> {
        let all = Vec::<Number>::deserialize(from)?;
        all.into_iter().map(Number::value).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde::{Deserialize, Serialize};

    #[derive(Debug, Serialize, Deserialize)]
    struct Losses(#[serde(with = "super::list")] Vec<f64>);

    #[test]
    fn every_float_survives() {
        let all = [
            0.1 + 0.2,
            -0.0,
            1e300,
            f64::NAN,
            f64::INFINITY,
            -f64::INFINITY,
        ];
        let text = serde_json::to_string(&Losses(all.to_vec())).unwrap();
        assert_eq!(
            text,
            r#"[0.30000000000000004,-0.0,1e+300,"NaN","inf","-inf"]"#
        );
        let back: Losses = serde_json::from_str(&text).unwrap();
        let bits = |all: &[f64]| all.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&back.0), bits(&all));
        let wrong = serde_json::from_str::<Losses>(r#"["one"]"#).unwrap_err();
        assert!(
            wrong.to_string().contains("`one` is not a number"),
            "{wrong}"
        );
    }
}
