//! Schemas: new ones, existing ones, and those of a later program.

use futures_util::future::join_all;

use super::*;

#[test]
fn servers_that_start_together_make_one_schema() {
    with_schema(async |schema| {
        let indexes = join_all((0..4).map(|_| schema.open())).await;
        let (id, head) = create(&indexes[0], 7, None).await;
        for index in &indexes {
            assert_eq!(index.head(OWNER, &id).await, Ok(head.clone()));
            assert_eq!(index.has_begun().await, Ok(false));
        }
        indexes[1].begin().await.expect("it begins");
        assert_eq!(indexes[2].has_begun().await, Ok(true));
        // An existing schema stays as it is.
        assert_eq!(schema.open().await.head(OWNER, &id).await, Ok(head));
    });
}

#[test]
fn the_schema_of_a_later_program_is_refused() {
    with_schema(async |schema| {
        schema.open().await.close().await.expect("the index closes");
        schema.execute("INSERT INTO migrations (version) VALUES (99)").await;
        let error = PostgresIndex::open(schema.options(), Box::new(|_| {})).await.expect_err("it is refused");
        let StoreError::Database { reason } = error else { panic!("{error}") };
        assert!(reason.contains("has version 99") && reason.contains("up to version 1"), "{reason}");
    });
}

#[test]
fn a_name_that_is_no_schema_is_refused() {
    with_schema(async |schema| {
        schema.open().await;
        let options = PostgresOptions { schema: "a; DROP TABLE b".to_owned(), ..schema.options() };
        let error = PostgresIndex::open(options, Box::new(|_| {})).await.expect_err("it is refused");
        assert!(matches!(error, StoreError::Database { .. }), "{error}");
    });
}
