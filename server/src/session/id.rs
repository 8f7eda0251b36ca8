//! Ids of sessions, versions, stored responses and owners. Ids cannot be guessed, and are checked where they enter the
//! program.

use std::fmt;

use rand::TryRngCore as _;
use rand::rngs::OsRng;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// The owner of a session or response. The default, all zeros, is the owner of everything created without a credential.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Owner(pub [u8; 16]);

/// Returns 128 random bits from the operating system.
fn random() -> u128 {
    let mut bytes = [0; 16];
    // Without random numbers, ids could be guessed, so there is no safe way to continue.
    OsRng.try_fill_bytes(&mut bytes).expect("the operating system provides random numbers");
    u128::from_le_bytes(bytes)
}

fn well_formed(text: &str, prefix: &str) -> bool {
    let digits = text.strip_prefix(prefix).map(str::as_bytes);
    digits.is_some_and(|digits| digits.len() == 32 && digits.iter().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f')))
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(String);

        impl $name {
            /// Creates a random id.
            #[allow(clippy::new_without_default, reason = "every id is different, so none is the default")]
            pub fn new() -> Self {
                Self(format!(concat!($prefix, "{:032x}"), random()))
            }

            /// Parses an id; `None` unless the text has exactly the right form.
            pub fn parse(text: &str) -> Option<Self> {
                well_formed(text, $prefix).then(|| Self(text.to_owned()))
            }

            /// Returns the id as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

id!(
    /// The id of a session: `ses_` and 32 hexadecimal digits.
    SessionId, "ses_"
);
id!(
    /// The id of a version, which is one immutable snapshot: `ver_` and 32 hexadecimal digits.
    VersionId, "ver_"
);
id!(
    /// The id of a stored response: `resp_` and 32 hexadecimal digits.
    ResponseId, "resp_"
);

impl SessionId {
    /// Returns the id of the session that an owner knows by this name and kind of name. The id gives no access: like
    /// any session, it is found only by its owner.
    #[must_use]
    pub fn named(owner: Owner, kind: &str, name: &str) -> Self {
        let digest = Sha256::new().chain_update(owner.0).chain_update(kind).chain_update([0]).chain_update(name);
        let digest: [u8; 32] = digest.finalize().into();
        Self(format!("ses_{}", super::hex::hex(&digest[..16])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_gives_one_id_for_each_owner_and_kind() {
        let named = |owner, kind, name| SessionId::named(Owner([owner; 16]), kind, name);
        let id = named(1, "slot", "7");
        assert_eq!(SessionId::parse(id.as_str()), Some(id.clone()));
        assert_eq!(named(1, "slot", "7"), id);
        let others = [named(2, "slot", "7"), named(1, "file", "7"), named(1, "slot", "8"), named(1, "slo", "t7")];
        assert!(!others.contains(&id), "{others:?}");
    }

    #[test]
    fn only_a_well_formed_id_is_parsed() {
        let id = SessionId::new();
        assert_eq!(SessionId::parse(id.as_str()), Some(id.clone()));
        assert_ne!(SessionId::new(), id);
        let digits = &id.as_str()[4..];
        for wrong in [
            String::new(),
            "ses_".to_owned(),
            digits.to_owned(),
            format!("ver_{digits}"),
            format!("ses_{digits}0"),
            format!("ses_{}", &digits[1..]),
            format!(" ses_{digits}"),
            format!("ses_{}G", &digits[1..]),
            format!("ses_{}A", &digits[1..]),
            format!("ses_{}é", &digits[2..]),
        ] {
            assert_eq!(SessionId::parse(&wrong), None, "{wrong}");
        }
    }
}
