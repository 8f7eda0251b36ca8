//! Lists sessions in pages, with filters.

use std::collections::BTreeMap;

use axum::extract::Query;
use axum::http::Uri;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use utoipa::openapi::Required;
use utoipa::openapi::path::{Parameter, ParameterBuilder, ParameterIn, ParameterStyle};
use utoipa::{IntoParams, PartialSchema, ToSchema};

use super::http::read_query;
use super::wire::{ListKind, MetadataField, Session, metadata};
use crate::api::error::ApiError;
use crate::api::request::continuation::session_id;
use crate::session::{Filter, Listing, Page};

/// Most sessions in one page.
const MAX_PAGE: u64 = 100;

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ListQuery {
    /// The model whose sessions are listed, as in `/v1/models`. Default: the first one.
    #[param(nullable = false)]
    model: Option<String>,
    /// Sessions per page. Default: 20.
    #[param(nullable = false, minimum = 1, maximum = 100)]
    limit: Option<u64>,
    /// The `next` of the previous page.
    #[param(nullable = false)]
    after: Option<String>,
    /// The order by creation time. Default: `desc`, the newest first.
    #[param(nullable = false, pattern = "^(asc|desc)$")]
    order: Option<String>,
    /// Only sessions whose current version has this label.
    #[param(nullable = false)]
    label: Option<String>,
    /// Only sessions with a tag of this name.
    #[param(nullable = false)]
    tag: Option<String>,
    /// Only forks of this session.
    #[param(nullable = false)]
    forked_from: Option<String>,
    /// Only sessions that were created later than this, in seconds since 1970.
    #[param(nullable = false)]
    created_after: Option<u64>,
    /// Only sessions that were created earlier than this, in seconds since 1970.
    #[param(nullable = false)]
    created_before: Option<u64>,
    /// Only sessions that were last changed later than this, in seconds since 1970.
    #[param(nullable = false)]
    updated_after: Option<u64>,
    /// Only sessions that were last changed earlier than this, in seconds since 1970.
    #[param(nullable = false)]
    updated_before: Option<u64>,
}

/// The query parameter `metadata[KEY]=VALUE`, which may be given any number of times.
pub(super) struct MetadataQuery;

impl IntoParams for MetadataQuery {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        let parameter = ParameterBuilder::new().name("metadata").parameter_in(ParameterIn::Query);
        let described = parameter
            .required(Required::False)
            .description(Some("Only sessions with these notes: `metadata[KEY]=VALUE`, once for each key."))
            .style(Some(ParameterStyle::DeepObject))
            .explode(Some(true))
            .schema(Some(MetadataField::schema()));
        vec![described.build()]
    }
}

/// Parses a part of a query, with the same error messages as other queries.
fn part<T: DeserializeOwned>(pairs: &[&str]) -> Result<T, ApiError> {
    let uri = format!("/?{}", pairs.join("&")).parse::<Uri>();
    let uri = uri.map_err(|error| ApiError::invalid(None, format!("the query cannot be parsed: {error}")))?;
    read_query(Query::try_from_uri(&uri))
}

/// Parses a query into the model that it names and the listing that it asks for.
pub(super) fn listing(query: &str) -> Result<(Option<String>, Listing), ApiError> {
    let is_note = |pair: &&str| {
        let start = pair.get(..8).unwrap_or_default();
        start == "metadata" && pair.get(8..).is_some_and(|rest| rest.starts_with('[') || rest.starts_with("%5"))
    };
    let (notes, others): (Vec<&str>, Vec<&str>) = query.split('&').partition(is_note);
    let query: ListQuery = part(&others)?;
    let limit = query.limit.unwrap_or(20);
    if !(1..=MAX_PAGE).contains(&limit) {
        let message = format!("limit must be from 1 to {MAX_PAGE}, found {limit}");
        return Err(ApiError::invalid(Some("limit"), message));
    }
    let newest_first = match query.order.as_deref() {
        None | Some("desc") => true,
        Some("asc") => false,
        Some(other) => {
            return Err(ApiError::invalid(Some("order"), format!("order must be asc or desc, found {other:?}")));
        }
    };
    for (name, time) in [
        ("created_after", query.created_after),
        ("created_before", query.created_before),
        ("updated_after", query.updated_after),
        ("updated_before", query.updated_before),
    ] {
        if let Some(time) = time.filter(|time| i64::try_from(*time).is_err()) {
            return Err(ApiError::invalid(Some(name), format!("{name} must be at most {}, found {time}", i64::MAX)));
        }
    }
    let filter = Filter {
        metadata: metadata(pairs(part(&notes)?)?)?,
        label: query.label,
        tag: query.tag,
        forked_from: query.forked_from,
        created: (query.created_after, query.created_before),
        updated: (query.updated_after, query.updated_before),
    };
    let after = query.after.map(|id| session_id(&id, "after")).transpose()?;
    Ok((query.model, Listing { after, limit: limit as usize, newest_first, filter }))
}

/// Parses `metadata[KEY]=VALUE` parameters.
fn pairs(found: Vec<(String, String)>) -> Result<BTreeMap<String, String>, ApiError> {
    let mut pairs = BTreeMap::new();
    for (name, value) in found {
        let key = name.strip_prefix("metadata[").and_then(|rest| rest.strip_suffix(']'));
        let form = || ApiError::invalid(Some("metadata"), "metadata must be given as metadata[KEY]=VALUE");
        if pairs.insert(key.ok_or_else(form)?.to_owned(), value).is_some() {
            return Err(ApiError::invalid(Some("metadata"), "metadata must be given once for each key"));
        }
    }
    Ok(pairs)
}

/// A page of sessions.
#[derive(serde::Serialize, ToSchema)]
pub(super) struct Sessions {
    object: ListKind,
    data: Vec<Session>,
    #[schema(required)]
    first_id: Option<String>,
    #[schema(required)]
    last_id: Option<String>,
    has_more: bool,
    /// The `after` of the next page; null at the end.
    #[schema(required)]
    next: Option<String>,
}

impl Sessions {
    pub(super) fn new(page: &Page, state_bytes: u64) -> Self {
        let data: Vec<Session> = page.sessions.iter().map(|session| Session::new(session, state_bytes)).collect();
        let id = |session: Option<&Session>| session.map(|session| session.id().to_owned());
        Self {
            object: ListKind,
            first_id: id(data.first()),
            last_id: id(data.last()),
            has_more: page.next.is_some(),
            next: page.next.as_ref().map(ToString::to_string),
            data,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_selects_by_notes_and_fields() {
        let (model, found) =
            listing("model=b&limit=3&metadata%5Btale%5D=a+fox%21&order=asc&metadata[b]=&created_after=5").unwrap();
        assert_eq!(model.as_deref(), Some("b"));
        assert_eq!((found.limit, found.newest_first, found.filter.created), (3, false, (Some(5), None)));
        let notes = [("tale", "a fox!"), ("b", "")].map(|(key, value)| (key.to_owned(), value.to_owned()));
        assert_eq!(found.filter.metadata, notes.into());
        let (_, plain) = listing("").unwrap();
        assert_eq!((plain.limit, plain.newest_first, plain.filter.metadata.len()), (20, true, 0));
        for (wrong, param) in [
            ("metadata[a]=1&metadata[a]=2", Some("metadata")),
            ("metadata[a=1", Some("metadata")),
            ("metadata[]=1", Some("metadata")),
            ("metadata=1", Some("metadata")),
            ("limit=0", Some("limit")),
            ("order=up", Some("order")),
            ("created_before=x", Some("created_before")),
            ("updated_before=9223372036854775808", Some("updated_before")),
            ("colour=red", Some("colour")),
            ("a:%20b=1", Some("a: b")),
        ] {
            let refused = listing(wrong).expect_err(wrong);
            assert_eq!(refused.param(), param, "{wrong}: {}", refused.message());
        }
    }
}
