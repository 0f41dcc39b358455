//! The text of a profile: a shipped one, or a file.

use shardlab_plan::hardware::FormatError;
use std::borrow::Cow;
use std::path::Path;

macro_rules! shipped {
    ($($name:literal),* $(,)?) => {
        pub(super) const SHIPPED: &[(&str, &str)] =
            &[$(($name, include_str!(concat!("../../../scenarios/hardware/", $name, ".toml")))),*];
    };
}
shipped![
    "a100-40",
    "a100-80",
    "b200",
    "cpu",
    "h100-80",
    "h100-80-exec",
    "h100-80-nvlink",
    "h100-96-500w",
    "h200-nvlink",
    "h200-nvlink-exec"
];

/// Why a profile cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// No shipped profile has the name and no file has the path.
    #[error("no hardware profile `{name}`: it is not a file, and the shipped profiles are {}", shipped().join(", "))]
    NotFound {
        /// Name or path asked for.
        name: String,
    },
    /// The file cannot be read.
    #[error("{path}: {message}")]
    Io {
        /// Path.
        path: String,
        /// Why.
        message: String,
    },
    /// The file is not a profile.
    #[error("{path}: {message}")]
    Parse {
        /// Path.
        path: String,
        /// Position and reason.
        message: String,
    },
    /// A number is missing or impossible.
    #[error("{path}: {message}")]
    Invalid {
        /// Path, and the position where it is known: `my.toml:3:12`.
        path: String,
        /// Which one and why.
        message: String,
    },
}

/// Returns the names of the shipped profiles, sorted.
#[must_use]
pub fn shipped() -> Vec<&'static str> {
    SHIPPED.iter().map(|&(name, _)| name).collect()
}

impl ProfileError {
    /// A fault of the format, at its place.
    pub(super) fn format(path: &str, e: FormatError) -> Self {
        let place = e.position.map(|at| format!(":{}:{}", at.line, at.column));
        Self::Invalid {
            path: format!("{path}{}", place.unwrap_or_default()),
            message: e.message,
        }
    }

    pub(super) fn parse(path: &str, e: &toml::de::Error) -> Self {
        Self::Parse {
            path: path.to_owned(),
            message: e.to_string().trim_end().to_owned(),
        }
    }
}

/// The text as it stands.
pub(super) fn read(name_or_path: &str) -> Result<Cow<'static, str>, ProfileError> {
    if let Some(&(_, text)) = SHIPPED.iter().find(|&&(name, _)| name == name_or_path) {
        return Ok(text.into());
    }
    let path = Path::new(name_or_path);
    if !path.is_file() {
        return Err(ProfileError::NotFound {
            name: name_or_path.to_owned(),
        });
    }
    let read = std::fs::read_to_string(path).map_err(|e| ProfileError::Io {
        path: name_or_path.to_owned(),
        message: e.to_string(),
    })?;
    Ok(read.into())
}
